package endpoint

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

// ConfigurationService implements the ConfigurationService.
type ConfigurationService struct {
	adminv1.UnimplementedConfigurationServiceServer
	InForce *latest.Value[trench.Loaded]
}

// GetConfiguration implements the ConfigurationService.
func (service ConfigurationService) GetConfiguration(context.Context, *adminv1.GetConfigurationRequest) (
	*adminv1.GetConfigurationResponse, error,
) {
	loaded := service.InForce.Load()
	if loaded.Generation == 0 {
		return nil, status.Error(codes.FailedPrecondition, "no configuration is in force yet")
	}
	return &adminv1.GetConfigurationResponse{TrenchFile: string(file.Marshal(loaded.Config))}, nil
}
